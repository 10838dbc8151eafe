"""Policy gradients on processes of this machine: an engine samples, FSDP2 trainers learn from it.

    python -m examples.rl_sync [--trainers 4] [--engine 2] [--steps 4]

After each optimiser step the weights move by plan, from the shards that the trainers hold to the
fused and padded weights of the engine.  Each step proves that the engine sampled with the weights
of the trainers: both sides' log-probabilities of the sampled tokens agree.  The last one proves
that every byte of the engine is what its own loader would have left there.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import loadplan

from .engine import Engine
from .policy import Config, Policy, log_probs

BATCH = 64
TOLERANCE = 2e-5  # of a log-probability: two ranks add in another order than one matrix does
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Setup:
    trainers: int
    engine: int
    steps: int
    config: Config

    @property
    def world(self) -> int:
        return self.trainers + self.engine


def reward(tokens: Tensor, config: Config) -> Tensor:
    """The share of even tokens in what was sampled, (batch,)."""
    return (tokens[:, config.prompt :] % 2 == 0).float().mean(-1)


def metas(config: Config) -> list[loadplan.ParamMeta]:
    with torch.device("meta"):
        named = Policy(config).state_dict()
    return [loadplan.ParamMeta(name, tuple(t.shape), t.dtype) for name, t in named.items()]


class TrainerRank:
    def __init__(self, setup: Setup, mesh: Any, group: dist.ProcessGroup) -> None:
        from torch.distributed.fsdp import fully_shard

        self.setup = setup
        torch.manual_seed(0)
        self.policy = Policy(setup.config)
        for layer in self.policy.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.policy, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)
        self.shards = loadplan.Shards.of_module(self.policy)
        self.schedule = loadplan.schedule_shards(group, shards=self.shards)

    def sync(self) -> loadplan.ExchangeReceipt:
        return loadplan.send_shards(self.shards, self.schedule)

    def learn(self, tokens: Tensor, theirs: Tensor) -> tuple[float, float]:
        """One step on what was sampled.

        Returns the mean reward, and how far the log-probabilities of both sides are apart.
        """
        config = self.setup.config
        rank = dist.get_rank()
        mine = slice(rank, None, self.setup.trainers)
        ours = log_probs(self.policy(tokens[mine]), tokens[mine])
        apart = (ours - theirs[mine]).abs().max().item()
        rewards = reward(tokens, config)
        advantage = (rewards - rewards.mean())[mine, None]
        loss = -(advantage * ours[:, config.prompt - 1 :]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return rewards.mean().item(), apart


class EngineRank:
    def __init__(
        self, setup: Setup, engine_group: dist.ProcessGroup, group: dist.ProcessGroup
    ) -> None:
        rank = dist.get_rank() - setup.trainers
        self.setup = setup
        self.engine = Engine(setup.config, rank, setup.engine, engine_group)
        loadplan.start_reload(self.engine)
        self.plan = loadplan.plan_loads(self.engine, metas(setup.config))
        loadplan.abort_reload(self.engine)
        self.schedule = loadplan.schedule_shards(group, plan=self.plan)

    def sync(self) -> loadplan.ExchangeReceipt:
        loadplan.start_reload(self.engine)
        receipt = loadplan.receive_shards(self.engine, self.plan, self.schedule)
        loadplan.finish_reload(self.engine)
        return receipt

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        config = self.setup.config
        generator = torch.Generator().manual_seed(step)
        prompts = torch.randint(config.vocab, (BATCH, config.prompt), generator=generator)
        tokens = self.engine.generate(prompts, seed=step)
        with torch.no_grad():
            return tokens, log_probs(self.engine(tokens), tokens)

    def prove(self, weights: dict[str, Tensor]) -> int:
        """Loads ``weights`` eagerly into a second engine; the number of bytes, all found equal."""
        other = Engine(self.setup.config, self.engine.rank, self.engine.size, None)
        other.load_weights(weights.items())
        count = 0
        for (name, ours), theirs in zip(
            self.engine.named_parameters(), other.parameters(), strict=True
        ):
            if not torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8)):
                raise SystemExit(f"`{name}` differs from what the eager loader leaves")
            count += ours.nbytes
        return count


def run(setup: Setup) -> None:
    """What each process does, with torch.distributed set up."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", list(range(setup.trainers)))
    engine_group = dist.new_group(list(range(setup.trainers, setup.world)))
    sync_group = dist.new_group()  # one of its own: a failed exchange leaves the others usable
    trains = dist.get_rank() < setup.trainers
    first = dist.get_rank() == 0
    side: Any
    if trains:
        side = TrainerRank(setup, mesh, sync_group)
    else:
        side = EngineRank(setup, engine_group, sync_group)
    traffic = side.schedule.traffic
    if first:
        print(side.schedule.report())
    config = setup.config
    rewards = []
    for step in range(setup.steps):
        start = time.perf_counter()
        side.sync()
        seconds = time.perf_counter() - start
        tokens = torch.empty(BATCH, config.length, dtype=torch.long)
        theirs = torch.empty(BATCH, config.length - 1)
        if not trains:
            tokens, theirs = side.sample(step)
        for tensor in (tokens, theirs):
            dist.broadcast(tensor, src=setup.trainers)
        if not trains:
            continue
        mean, apart = side.learn(tokens, theirs)
        if apart > TOLERANCE:
            raise SystemExit(f"log-probabilities differ by {apart:.1e}, allowed {TOLERANCE:.0e}")
        rewards.append(mean)
        if first:
            print(
                f"step {step}: reward {mean:.3f}, log-probabilities agree to {apart:.0e}, "
                f"synced in {1000 * seconds:.0f} ms"
            )
    side.sync()
    weights = {}
    for meta in metas(config):
        full = torch.empty(meta.shape)
        if trains:
            full = side.policy.get_parameter(meta.name).full_tensor().detach()
        dist.broadcast(full, src=0)
        weights[meta.name] = full
    equal = torch.tensor(0 if trains else side.prove(weights))
    dist.all_reduce(equal)
    if first:
        print(f"proof: {equal.item():,} bytes of the engine equal the eager loader's")
        print(
            f"bytes of an update: {traffic.total:,}; broadcast moves {traffic.broadcast:,} "
            f"({traffic.broadcast / traffic.total:.2f} times as many)"
        )
        if setup.steps > 2 and not rewards[-1] > rewards[0]:
            raise SystemExit(f"the policy did not learn: rewards {rewards}")


def _process(rank: int, setup: Setup, port: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=setup.world, timeout=timedelta(seconds=120)
    )
    run(setup)
    dist.barrier()
    dist.destroy_process_group()


def launch(setup: Setup) -> None:
    """Runs the demo on processes of this machine; raises where one of them fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.start_processes(
        _process, (setup, store.port), nprocs=setup.world, start_method="forkserver"
    )
    del store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--engine", type=int, default=2, help="tensor-parallel inference ranks")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    launch(Setup(arguments.trainers, arguments.engine, arguments.steps, Config()))
