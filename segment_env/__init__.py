"""Boundary placement as a reinforcement-learning environment: streams, the decision process, and what scores it.

The modules are the public face: ``segment_env.env`` (TorchRL environment), ``segment_env.unroll`` (a trajectory in one pass),
``segment_env.collector``, ``segment_env.streams``, ``segment_env.scorer`` (the protocols), ``segment_env.boundaries`` (the
convention). Nothing is imported here, so that programs which need no TorchRL do not wait for it.
"""
