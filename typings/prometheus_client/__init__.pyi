from collections.abc import Iterable, Mapping

class Sample:
    name: str

class Metric:
    samples: list[Sample]

class CollectorRegistry:
    def collect(self) -> Iterable[Metric]: ...
    def get_sample_value(
        self, name: str, labels: Mapping[str, str] | None = ...
    ) -> float | None: ...

class _Labelled:
    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Iterable[str] = ...,
        *,
        registry: CollectorRegistry | None = ...,
    ) -> None: ...
    def remove_by_labels(self, labels: dict[str, str]) -> None: ...

class Gauge(_Labelled):
    def labels(self, *labelvalues: str) -> Gauge: ...
    def set(self, value: float) -> None: ...

class Counter(_Labelled):
    def labels(self, *labelvalues: str) -> Counter: ...
    def inc(self, amount: float = ...) -> None: ...

REGISTRY: CollectorRegistry

def start_http_server(port: int, addr: str = ...) -> object: ...
