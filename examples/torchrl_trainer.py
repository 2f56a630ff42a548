"""TorchRL's trainer, replay buffer and PPO loss learn where to cut, on our collector: prints the mean reward, in nats per byte."""

import torch
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import reward2go
from torchrl.trainers import ReplayBufferTrainer, Trainer

from agents.policies import WindowPolicy
from segment_env.actor import Actor, loss_actor
from segment_env.batch import Episodes
from segment_env.collector import SegmentCollector
from segment_env.diagnostics import Delimiter
from segment_env.env import SegmentEnv
from segment_env.masking import mask_invalid


def advantage(batch):  # the return with a discount of 0.9, less its mean over the rows at the same byte
    returns = reward2go(batch["next", "reward"], batch["next", "done"], 0.9)
    return mask_invalid(batch.set("advantage", returns - returns.mean(0)))


def main(rows=16, length=128, batches=100):
    problem, frames = Delimiter(), batches * rows * length
    policy = WindowPolicy(problem.width, target=problem.rate, logit_scale=1)
    env = SegmentEnv(problem, Episodes(problem, rows, length, seed=0), price=problem.default_price)
    collector = SegmentCollector(env, Actor(policy, problem), total_frames=frames)
    loss = ClipPPOLoss(loss_actor(policy), None, entropy_bonus=False)
    loss.loss_mask_key = "is_choice"
    settings = {"total_frames": frames, "frame_skip": 1, "optim_steps_per_batch": 4, "progress_bar": False}
    trainer = Trainer(collector=collector, loss_module=loss, optimizer=torch.optim.Adam(loss.parameters(), lr=0.1), **settings)
    trainer.register_op("batch_process", advantage)
    rows_seen = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=SamplerWithoutReplacement(), batch_size=rows // 4)
    ReplayBufferTrainer(rows_seen, flatten_tensordicts=False).register(trainer)
    trainer.train()
    return float(env.rollout(length, Actor(policy, problem))["next", "reward"].mean())


if __name__ == "__main__":
    print(f"{main():.3f} nats per byte; the best policy expects {Delimiter().scores(Delimiter().rate, 0.5)['oracle']:.3f}")
