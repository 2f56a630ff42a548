"""Where bytes come from: streams are pure functions of (seed, global sequence index), corpora the bytes behind them."""

from segment_env.streams.corpora import SPLITS, Corpus, files, moby_dick, standard_library
from segment_env.streams.made_up import MadeUpLanguage
from segment_env.streams.text import TextStream, crops, whitespace_starts

__all__ = ["SPLITS", "Corpus", "MadeUpLanguage", "TextStream", "crops", "files", "moby_dick", "standard_library", "whitespace_starts"]
