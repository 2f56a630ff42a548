import hypothesis
import pytest
import torch

hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,  # the first call of a torch function takes far longer than the next
    derandomize=True,  # the same examples every time; a seed found elsewhere becomes an @example
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that a test should hold on: the test runs once for each."""
    return torch.device(request.param)
