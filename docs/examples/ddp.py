"""PyTorch's DistributedDataParallel, for the page about migrating from it.

torchrun --nproc-per-node 2 ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(120, 10)
train = TensorDataset(inputs, (inputs.sum(1) > 0).long())

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

sampler = DistributedSampler(train)
batches = DataLoader(train, 6, sampler=sampler)

model = DistributedDataParallel(torch.nn.Linear(10, 2))
optimizer = torch.optim.Adam(model.parameters())

for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, t in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), t)
        loss.backward()  # averages the gradients
        optimizer.step()

dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
