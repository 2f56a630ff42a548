"""Diagnostic problems: each isolates one difficulty of placing boundaries, has a known best policy, and is learned in seconds.

A problem is both a stream of bytes (:class:`segment_env.batch.ByteStream`) and the scorer of that stream
(:class:`segment_env.scorer.Scorer`); :func:`oracle` is its best policy and ``scores`` what that and others expect.
"""

from segment_env.diagnostics.deceptive import Deceptive
from segment_env.diagnostics.delayed import Delayed
from segment_env.diagnostics.oracle import oracle
from segment_env.diagnostics.period import Period
from segment_env.diagnostics.spelled import Delimiter, Silence
from segment_env.diagnostics.words import Words

__all__ = ["Deceptive", "Delayed", "Delimiter", "Period", "Silence", "Words", "oracle"]
