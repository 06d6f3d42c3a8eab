"""Notice the iteration in which the replicas are no longer equal, and say where they differ."""

import hashlib

from chainer.backends.cuda import to_cpu
from small_training import make_trainer

import chainermn


def differences(comm, model):
    """Return the parameters that are not those of rank 0, with the ranks that differ. Collective.

    Parameters are compared bit for bit.
    """
    own = {
        name: hashlib.sha256(to_cpu(parameter.array).tobytes()).digest()
        for name, parameter in sorted(model.namedparams())
    }
    everywhere = comm.allgather_obj(own)
    found = {
        name: [rank for rank, other in enumerate(everywhere) if other[name] != everywhere[0][name]]
        for name in own
    }
    return {name: ranks for name, ranks in found.items() if ranks}


def main() -> None:
    comm = chainermn.create_communicator()
    trainer = make_trainer(comm, epochs=1, out="result")

    def compare_replicas(trainer):
        model = trainer.updater.get_optimizer("main").target
        if found := differences(comm, model):
            raise ValueError(f"iteration {trainer.updater.iteration}: ranks differ in {found}")

    trainer.extend(compare_replicas, trigger=(1, "iteration"))  # on every rank

    if comm.rank == 1:  # the mistake
        model = trainer.updater.get_optimizer("main").target
        model.predictor.b.update_rule.enabled = False
    try:
        trainer.run(show_loop_exception_msg=False)
    except ValueError as error:
        if comm.rank == 0:
            print(error)


if __name__ == "__main__":
    main()
