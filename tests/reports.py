"""Small trained runs for the tests of pages, on text that would do harm to a careless one."""

from pathlib import Path

from agents import config, training

#: Markup, a template's own marks, mathematics, marks that turn the direction of reading, a NUL, halves of characters, two scripts.
HOSTILE = (
    b"<script>document.title='owned'</script> <img src=x onerror=\"document.title='owned'\"> <b>&amp; {{ 7*7 }} {% raw %} $x^2$ "
    + "\u202eright to left\u202c שלום עולם، مرحبا \u2028".encode()
    + b"\x00\xff\xe2\x80 ]]> --> </style></pre> \n"
)
TINY = ["data.length=256", "train.rows=2", "train.validation_bytes=512", "train.optimiser.precision=float32", "train.device=cpu"]
TINY += ["train.log_every=1", "train.validations=2", "train.checkpoint_every=1", "train.keep=100"]
MODEL = "model.size={_target_:models.Size,width:16,heads:2,encoder:1,mid:1,decoder:1,window:4}"


def train(folder: Path, *overrides: str, updates: int = 8) -> Path:
    """A run of a few updates on HOSTILE text, unless ``overrides`` name other data."""
    text = folder.parent / "hostile.txt"
    text.write_bytes(HOSTILE * 60)
    named = {each.split("=")[0] for each in overrides}
    data = [] if named & {"data", "diagnostic"} else ["data=files", f"data.source.path={text}"]
    model = [] if "diagnostic" in named else [MODEL]  # its problem scores itself
    settings = config.load([*data, *model, *TINY, f"train.bytes={512 * updates}", *overrides])
    training.begin(settings, folder, "segment-env train as it was asked for")
    training.train(training.Run(settings), folder, progress=False)
    return folder
