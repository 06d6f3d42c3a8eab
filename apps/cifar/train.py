#!/usr/bin/env python3
"""Train a network to classify small color images."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import chainer
from chainer.training import extensions

import data
import training
from chainermn.agreement import exit_together, run_on_root
from chainermn.extensions import DistributedReport, StopOnSignal, multi_node_snapshot, record_run
from chainermn.files import check_trained, read_bytes
from chainermn.progress import silence
from model import MOST_BYTES, load_weights
from reports import add_reports, print_summary, show_data

# A run can be resumed with other values of these.
FREE = training.FREE | {"resume", "evaluate", "tensorboard", "quiet"}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.quiet:
        silence()
    comm, device = training.start(args)
    with exit_together(comm):
        sources = args.dataset, args.data, args.examples
        images = run_on_root(comm, 0, "data", lambda: data.load(*sources))
    trainer, network = training.create_trainer(args, comm, device, images)
    if not args.evaluate:
        trainer.extend(DistributedReport(comm))
        with exit_together(comm):
            if comm.rank == 0:
                show_data(images, args.out)
                add_reports(trainer, network, args, comm.size)
        settings = {name: value for name, value in vars(args).items() if name not in FREE}
        settings |= images.settings()
        snapshot = extensions.snapshot(n_retains=3)
        snapshot = multi_node_snapshot(comm, snapshot, [], settings=settings)
        trainer.extend(snapshot)
        trainer.extend(StopOnSignal(comm, snapshot))
        with exit_together(comm):
            snapshot.resume(trainer, args.resume)
            record_run(comm, {**vars(args), "classes": images.classes}, args.out)
        trainer.run()
        if comm.rank == 0:
            print_summary(trainer)

    best = Path(args.out, "best.npz")

    def read() -> bytes:
        check_trained(best, __file__)
        images.check_classes(best.with_name("run.json"))
        return read_bytes(best, MOST_BYTES)

    with exit_together(comm):
        # Rank 0 has written it, and the others may have come here before.
        load_weights(run_on_root(comm, 0, "test", read), best, network)
    model = chainer.links.Classifier(network)
    found = training.create_evaluator(comm, model, images.test, device)()
    if comm.rank == 0:
        accuracy = found["main/accuracy"]
        print(f"{accuracy:.2%} of the {len(images.test)} test images recognized by the best")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    training.add_arguments(parser, epoch=12)
    add = parser.add_argument
    add("--unit", "-u", type=int, default=16, help="channels of the first layer")
    add("--dropout", type=float, default=0.1, help="default: %(default)s")
    lr = "learning rate for 100 images per step; default: %(default)s"
    add("--lr", type=float, default=0.4, help=lr)
    add("--weight-decay", type=float, default=5e-4, help="default: %(default)s")
    add("--resume", "-r", metavar="FILE", help="snapshot to resume from; default: the newest")
    add("--tensorboard", action="store_true", help="also write the log for TensorBoard")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--evaluate", action="store_true", help="do not train; test best.npz in --out")
    add("--quiet", "-q", action="store_true", help="print only warnings and errors")
    return training.checked(parser, argv)


if __name__ == "__main__":
    main()
