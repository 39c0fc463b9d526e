"""Small numbers out of a fuzzer's bytes, first byte first, so that a mutation changes one choice and not all."""

from __future__ import annotations


class Choices:
    """What is beyond the end is 0, so that every input is a whole story."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> bool:
        return self._at < len(self._data)

    def below(self, n: int) -> int:
        """A number in 0..n-1, n at most 256, from one byte."""
        if self._at == len(self._data):
            return 0
        byte = self._data[self._at]
        self._at += 1
        return byte % n

    def several(self, most: int, n: int) -> list[int]:
        """Up to `most` numbers in 0..n-1."""
        return [self.below(n) for _ in range(self.below(most + 1))]
