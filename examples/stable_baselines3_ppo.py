"""PPO of Stable-Baselines3 learns where to cut: prints its return on a scale where random cuts are 0 and the best policy is 1.

Random cuts are independent, at the best policy's rate. Run it with ``python examples/stable_baselines3_ppo.py`` (about a minute).
"""

import gymnasium
import numpy as np
from stable_baselines3 import PPO

from segment_env.gym import ID


def mean_return(decide, episodes, seed=1_000_000):
    """Mean return in nats of ``decide(observation, best)``; the episodes are the same for everyone, and none was trained on."""
    env = gymnasium.make(ID)
    core, total = env.unwrapped.core, 0.0
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        for best in core.episodes.stream.reference(core.batch.bytes)[0].int().tolist():
            observation, reward, *_ = env.step(decide(observation, best))
            total += reward
    return total / episodes


def main(steps=50_000, seed=0, episodes=50):
    """Train on ``steps`` bytes; returns the normalised score."""
    model = PPO("MultiInputPolicy", gymnasium.make(ID), n_steps=1024, batch_size=256, gamma=0.9, learning_rate=1e-3, seed=seed)
    model.learn(steps)
    draw = np.random.default_rng(seed)
    rate = gymnasium.make(ID).unwrapped.core.scorer.rate
    learned = mean_return(lambda observation, _: model.predict(observation)[0], episodes)
    random = mean_return(lambda *_: int(draw.random() < rate), episodes)
    oracle = mean_return(lambda _, best: best, episodes)
    return (learned - random) / (oracle - random)


if __name__ == "__main__":
    print(f"normalised score {main():.3f}")
