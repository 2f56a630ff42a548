"""Where bytes come from.

Streams are pure functions of (seed, global sequence index), corpora the bytes behind them; documents, of any size, are streamed.
"""

from segment_env.streams.corpora import SPLITS, Corpus, files, moby_dick, standard_library
from segment_env.streams.documents import Documents, HubDocuments, LocalDocuments
from segment_env.streams.made_up import MadeUpLanguage
from segment_env.streams.text import TextStream, crops, whitespace_starts

__all__ = [
    "SPLITS",
    "Corpus",
    "Documents",
    "HubDocuments",
    "LocalDocuments",
    "MadeUpLanguage",
    "TextStream",
    "crops",
    "files",
    "moby_dick",
    "standard_library",
    "whitespace_starts",
]
