"""A GAN: two DDP models, two optimizers, two updates a step."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    torch.manual_seed(1)
    size = context.hidden
    maker = DDP(torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.Tanh(), torch.nn.Linear(size, size)))
    judge = DDP(torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 1)))
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.002, betas=(0.5, 0.9))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.9))
    for step in range(4):
        judge_optimizer.zero_grad()
        made = maker(context.inputs(step, 0))
        loss = (1 - judge(context.inputs(step, 1))).relu().mean() + (1 + judge(made.detach())).relu().mean()
        loss.backward()
        context.watch.look("judge", judge)
        judge_optimizer.step()
        context.watch.step(model=[maker, judge], optimizer=[maker_optimizer, judge_optimizer], loss=loss)
        maker_optimizer.zero_grad()
        loss = -judge(maker(context.inputs(step, 2))).mean()
        loss.backward()
        context.watch.look("maker", maker)
        context.watch.look("judge after maker", judge)
        maker_optimizer.step()
        context.watch.step(model=[maker, judge], optimizer=[maker_optimizer, judge_optimizer], loss=loss)
