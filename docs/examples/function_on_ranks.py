from chainermn.launch import run


def largest(numbers):
    import chainermn

    comm = chainermn.create_communicator()
    mine = max(numbers[comm.rank :: comm.size])
    print("my part has", mine)
    return max(comm.allgather_obj(mine))


print(run(largest, [3, 1, 4, 1, 5], ranks=2))
