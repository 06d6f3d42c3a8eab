#!/usr/bin/env python3
"""Train a convolutional network to classify images."""

import argparse
import copy
import signal
from collections.abc import Sequence

import chainer
from chainer.training import extensions

import batches
import chainermn
import data
import evaluation
import job
import options
import reports
import training
from chainermn.agreement import exit_together
from chainermn.extensions import (
    AllreducePersistent,
    DistributedReport,
    StepSeed,
    StopOnSignal,
    multi_node_snapshot,
    record_run,
)
from chainermn.iterators import prefetch_to_device
from chainermn.progress import silence


def main(argv: Sequence[str] | None = None) -> None:
    args = options.parse_arguments(argparse.ArgumentParser(description=__doc__), argv)
    if args.quiet:
        silence()
    comm, device = job.start(args)
    with exit_together(comm):
        train, validation, about, inspection = job.load_lists(args, comm)
    network = job.create_network(args, comm, about)
    average = copy.deepcopy(network) if args.ema else None
    model, optimizer = job.create_model(network, args, comm, device)
    with exit_together(comm):
        iterators = batches.create_iterators(args, comm, train, validation, about)
    training_batches, validation_batches = iterators

    to_batch = data.ToBatch(about["mean"], about["deviation"], args.skip_unreadable)
    converted = training_batches, to_batch
    if args.prefetch or args.graphs:
        converted = prefetch_to_device(*converted, device)
    updater = chainer.training.StandardUpdater(converted[0], optimizer, converted[1], device)
    end = (10, "iteration") if args.test else (args.epoch, "epoch")
    trigger = end if args.test else (1, "epoch")
    trainer = chainer.training.Trainer(updater, end, out=args.out)
    trainer.extend(StepSeed(args.seed, comm))
    trainer.extend(inspection)
    peak = args.lr * args.batchsize * comm.size / 256
    trainer.extend(training.LearningRate(peak, args.epoch, args.warmup, args.schedule))
    evaluated = model
    if average is not None:
        evaluated = training.Classifier(average)
        evaluated.to_device(device)
        trainer.extend(training.MovingAverage(average, model.predictor, args.ema))
    evaluator = evaluation.TopKEvaluator(
        validation_batches, evaluated, len(about["classes"]), to_batch, device
    )
    skipped = reports.SkippedFiles(comm, to_batch)
    trainer.extend(skipped, trigger=trigger)
    evaluator = chainermn.create_multi_node_evaluator(evaluator, comm, mean_over="examples")
    trainer.extend(evaluator, trigger=trigger)
    picture = evaluation.ConfusionPicture(comm, evaluator, about["classes"])
    trainer.extend(picture, trigger=trigger)
    trainer.extend(DistributedReport(comm), trigger=trigger)
    if args.evaluate is not None:
        found = evaluator()
        skipped()
        validation_batches.finalize()
        if comm.rank == 0:
            reports.print_evaluation(found)
        return

    with exit_together(comm):
        if comm.rank == 0:
            reports.add_reports(trainer, evaluated.predictor, args, comm.size, trigger)
    snapshot = extensions.snapshot(savefun=reports.save, n_retains=3)
    # Of the lists as they were read: --skip-unreadable is also for those that resume.
    names = "validation_images", "train_images"
    digests = {n: s.digest() for n, s in zip(names, inspection.sources, strict=True)}
    settings = options.settings_of(args, about, digests)
    snapshot = multi_node_snapshot(comm, snapshot, [], settings=settings)
    interval = training.EpochOrInterval(args.checkpoint)
    trainer.extend(snapshot, trigger=interval)
    # Batch normalization's statistics differ between ranks, and a snapshot stores one set.
    average_statistics = AllreducePersistent(model, comm)
    trainer.extend(average_statistics, trigger=interval)

    def stop_with(trainer: chainer.training.Trainer) -> None:
        average_statistics(trainer)
        snapshot(trainer)

    # Not for SIGTERM: it is sent to all processes and ends the workers, which training waits for.
    trainer.extend(StopOnSignal(comm, stop_with, [signal.SIGUSR1]))
    with exit_together(comm):
        if not args.test:
            snapshot.resume(trainer, args.resume)
        record_run(comm, vars(args), args.out)
        if comm.rank == 0:
            reports.save_description(args.out, about)
            examples = batches.training_examples(train, args, about["insize"])
            lists = train, validation
            most = 14 - inspection.printed
            reports.show_images(args.out, about["classes"], *lists, examples, most=most)
    trainer.run()

    if comm.rank == 0:
        reports.print_summary(trainer, len(skipped.known))


if __name__ == "__main__":
    main()
