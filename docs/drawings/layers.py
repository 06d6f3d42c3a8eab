"""What is above and below MPI."""

from drawings.svg import Canvas


def draw() -> Canvas:
    canvas = Canvas(470, 292)
    canvas.box(10, 10, 450, 40, "your script: train.py", kind="model")
    canvas.box(10, 62, 215, 40, "Chainer", "", kind="data")
    canvas.box(235, 62, 225, 40, "ChainerMN: communicator", kind="gradient")
    canvas.text(117, 92, "model, backward, optimizer", kind="small")
    canvas.box(235, 114, 225, 40, "mpi4py", kind="data")
    canvas.box(10, 114, 215, 92, "NumPy", kind="data")
    canvas.box(235, 166, 225, 40, "MPI: MPICH or Open MPI", kind="gradient")
    canvas.box(10, 218, 450, 40, "processes, memory of the host, network", kind="rank")
    canvas.text(235, 276, "mpiexec starts all of it once for each rank", kind="note")
    return canvas
