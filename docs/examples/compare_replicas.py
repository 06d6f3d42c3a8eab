"""A mistake that makes the replicas differ, and what ChainerMN says about it."""

from small_training import make_trainer

import chainermn


def main() -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, epochs=3, out="result")
    weight = trainer.updater.get_optimizer("main").target.predictor.W.array

    def clip(trainer):
        weight[...] = weight.clip(-0.25, 0.25)

    if comm.rank == 0:  # the mistake
        trainer.extend(clip, trigger=(15, "iteration"))
    try:
        trainer.run(show_loop_exception_msg=False)
    except ValueError as error:
        if comm.rank == 0:
            print(error)


if __name__ == "__main__":
    main()
