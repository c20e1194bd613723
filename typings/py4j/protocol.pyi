"""The part of PySpark's bridge to Java that Turbopump uses; it has no types."""

class _JavaException:
    def toString(self) -> str: ...  # noqa: N802 - Java's name

class Py4JError(Exception): ...

class Py4JJavaError(Py4JError):
    java_exception: _JavaException
