"""The rules of the caching allocator once more, as plainly as can be: lists that are scanned from end to end."""

from __future__ import annotations

MIB = 1 << 20


class Plain:
    """The default rules again, with one list of [address, size, stream, small, free, segment] to scan."""

    def __init__(self) -> None:
        self.blocks: list[list[int | str]] = []
        self.reserved = self.segments = 0

    def allocate(self, bytes: int, stream: str) -> list[int | str]:
        size = -(-bytes // 512) * 512
        small = size <= MIB
        fits = [b for b in self.blocks if b[4] and b[2] == stream and b[3] == small and b[1] >= size]
        block = min(fits, key=lambda b: (b[1], b[0])) if fits else self.segment(size, stream, small)
        rest = int(block[1]) - size
        if rest >= 512 if small else rest > MIB:
            self.blocks.append([int(block[0]) + size, rest, stream, small, True, block[5]])
            block[1] = size
        block[4] = False
        return block

    def segment(self, size: int, stream: str, small: bool) -> list[int | str]:
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.segments += 1
        self.blocks.append([self.reserved, total, stream, small, True, self.segments])
        self.reserved += total
        return self.blocks[-1]

    def free(self, block: list[int | str]) -> None:
        block[4] = True
        while True:
            for low in self.blocks:
                high = next((b for b in self.blocks if b[5] == low[5] and b[0] == low[0] + low[1]), None)
                if low[4] and high is not None and high[4]:
                    low[1] += high[1]
                    self.blocks = [b for b in self.blocks if b is not high]
                    break
            else:
                return
