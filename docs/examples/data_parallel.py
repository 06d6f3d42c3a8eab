"""Data parallelism with NumPy and mpi4py alone: naive, with buckets, overlapped with backward.

Every rank has the whole network and its share of the examples. All average their gradients, then
take the same step. Try it: ``mpiexec -n 2 python docs/examples/data_parallel.py``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

Array = NDArray[np.float32]
BUCKET_BYTES = 4096  # real networks are larger, and so are their buckets
RATE, STEPS = 0.2, 40

# One seed: every rank has the same examples and the same parameters to start with.
RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(-1, 1, (240, 2)).astype(np.float32)
T = np.sign(X[:, :1] * X[:, 1:])
SHAPES = (2, 32), (32,), (32, 32), (32,), (32, 32), (32,), (32, 1), (1,)  # weights, biases, ...
START = [RANDOM.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for shape in SHAPES]


def naive(comm: MPI.Intracomm, backward: Iterable[Array]) -> list[Array]:
    """Compute all gradients, then average one after the other."""
    gradients = list(backward)
    for gradient in gradients:
        comm.Allreduce(MPI.IN_PLACE, gradient)  # now it is the sum over all ranks
        gradient /= comm.size
    return gradients


def with_buckets(comm: MPI.Intracomm, backward: Iterable[Array]) -> list[Array]:
    """Send small gradients together, because even the shortest message takes some time."""
    gradients = list(backward)
    for bucket in buckets(gradients):
        buffer = pack(bucket)
        comm.Allreduce(MPI.IN_PLACE, buffer)
        unpack(buffer / comm.size, bucket)
    return gradients


def overlapped(comm: MPI.Intracomm, backward: Iterable[Array]) -> list[Array]:
    """Send each bucket as soon as it is full, while backward computes the other gradients."""
    under_way = []
    # All ranks start the same all-reduces in the same order, because all run the same backward.
    for bucket in buckets(backward):
        buffer = pack(bucket)
        under_way.append((bucket, buffer, comm.Iallreduce(MPI.IN_PLACE, buffer)))
        for *_, request in under_way:
            request.Test()  # many MPI libraries move data only while they are called
    for bucket, buffer, request in under_way:
        request.Wait()  # until then, the buffer belongs to MPI
        unpack(buffer / comm.size, bucket)
    return [gradient for bucket, *_ in under_way for gradient in bucket]


def buckets(gradients: Iterable[Array]) -> Iterator[list[Array]]:
    """Group gradients, and yield each bucket before asking for the next gradient."""
    bucket: list[Array] = []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(one.nbytes for one in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def pack(bucket: Sequence[Array]) -> Array:
    return np.concatenate([gradient.ravel() for gradient in bucket])


def unpack(buffer: Array, bucket: Sequence[Array]) -> None:
    for gradient in bucket:
        gradient.flat[:], buffer = buffer[: gradient.size], buffer[gradient.size :]


def backward(parameters: Sequence[Array], outputs: Sequence[Array], t: Array) -> Iterator[Array]:
    """Yield the gradients of the mean squared error, from the last parameter to the first."""
    error = 2 / t.size * (outputs[-1] - t)
    for layer in reversed(range(len(parameters) // 2)):
        error = error * (1 - outputs[layer + 1] ** 2)  # the derivative of tanh
        yield error.sum(axis=0)
        yield outputs[layer].T @ error
        error = error @ parameters[2 * layer].T


def train(comm: MPI.Intracomm, average: Callable[..., list[Array]]) -> tuple[Array, Array]:
    """Return the parameters after training, and the loss on all examples before each step."""
    parameters, losses = [start.copy() for start in START], []
    # The shares are equal, so the mean of the ranks' means is the mean over all examples.
    x, t = X[comm.rank :: comm.size], T[comm.rank :: comm.size]
    for _ in range(STEPS):
        outputs = [x]  # then the output of every layer
        for w, b in zip(parameters[::2], parameters[1::2], strict=True):
            outputs.append(np.tanh(outputs[-1] @ w + b))
        losses.append(np.mean((outputs[-1] - t) ** 2))
        gradients = average(comm, backward(parameters, outputs, t))
        # The replicas were equal, and the means are: so they are equal after the step, too.
        for parameter, gradient in zip(reversed(parameters), gradients, strict=True):
            parameter -= RATE * gradient
    return pack(parameters), comm.allreduce(np.array(losses)) / comm.size


def main() -> None:
    comm = MPI.COMM_WORLD
    expected, losses = train(comm, naive)
    lines = [f"naive: loss {losses[0]:.2f} in the first step, {losses[-1]:.2f} in step {STEPS}"]
    for average in (with_buckets, overlapped):
        difference = np.abs(train(comm, average)[0] - expected).max()
        # With three ranks or more, MPI may add the elements of a longer buffer in another order.
        lines.append(f"{average.__name__}: parameters differ by {difference}")
    if comm.rank == 0:
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
