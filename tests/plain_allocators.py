"""The rules of the caching allocator once more, as plainly as can be: lists that are scanned from end to end."""

from __future__ import annotations

MIB = 1 << 20


class Plain:
    """The default rules again, with one list of [address, size, stream, small, free, segment] to scan."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.blocks: list[list[int | str]] = []
        self.segments: dict[int, int] = {}
        self.top = self.number = self.retries = 0

    def reserved(self) -> int:
        return sum(self.segments.values())

    def allocate(self, bytes: int, stream: str) -> list[int | str] | None:
        size = -(-bytes // 512) * 512
        small = size <= MIB
        fits = [b for b in self.blocks if b[4] and b[2] == stream and b[3] == small and b[1] >= size]
        block = min(fits, key=lambda b: (b[1], b[0])) if fits else self.segment(size, stream, small)
        if block is None:
            return None
        rest = int(block[1]) - size
        if rest >= 512 if small else rest > MIB:
            self.blocks.append([int(block[0]) + size, rest, stream, small, True, block[5]])
            block[1] = size
        block[4] = False
        return block

    def segment(self, size: int, stream: str, small: bool) -> list[int | str] | None:
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved() + total > self.capacity:
            whole = {number for number in self.segments if [b[4] for b in self.blocks if b[5] == number] == [True]}
            self.blocks = [b for b in self.blocks if b[5] not in whole]
            for number in whole:
                del self.segments[number]
            self.retries += 1
            if self.reserved() + total > self.capacity:
                return None
        self.number += 1
        self.segments[self.number] = total
        self.blocks.append([self.top, total, stream, small, True, self.number])
        self.top += total
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


class PlainExpandable:
    """The expandable rules again: each pool as one list of [size, state], joined anew after every change."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.pools: dict[tuple[str, bool], list[list[int | str]]] = {}
        self.retries = self.reserved = 0

    def allocate(self, bytes: int, stream: str) -> tuple[str, bool, int] | None:
        """The pool, and the address in it."""
        size = -(-bytes // 512) * 512
        key = stream, size <= MIB
        pool = self.pools.setdefault(key, [[1 << 50, "void"]])
        fits = sorted((piece[0], i) for i, piece in enumerate(pool) if piece[1] == "free" and piece[0] >= size)
        grown = [n + (pool[i + 1][0] if pool[i + 1][1] == "void" else 0) for n, i in fits]
        best = next((k for k in range(len(fits)) if k + 1 == len(fits) or grown[k + 1] >= grown[k]), None)
        index = fits[best][1] if best is not None else self.expand(key, size)
        if index is None:
            return None
        pool = self.pools[key]
        pool[index : index + 1] = [[size, "used"], [pool[index][0] - size, "free"]]
        address = sum(piece[0] for piece in pool[:index])
        self.join(key)
        return *key, address

    def expand(self, key: tuple[str, bool], size: int) -> int | None:
        for attempt in range(2):
            index = self.fill(key, size)
            if index is not None or self.capacity is None:
                return index
            if attempt == 0:
                self.retries += 1
                self.release()
        return None

    def fill(self, key: tuple[str, bool], size: int) -> int | None:
        """Position of a free piece of at least ``size``, pages put where there are none."""
        page = (2 if key[1] else 20) * MIB
        pool = self.pools[key]
        for index, piece in enumerate(pool):
            start = index - 1 if index and piece[1] == "void" and pool[index - 1][1] == "free" else index
            used = next((i for i in range(start, len(pool)) if pool[i][1] == "used"), len(pool))
            if piece[1] == "void" and sum(piece[0] for piece in pool[start:used]) >= size:
                break
        while pool[start][1] == "void" or pool[start][0] < size:
            have = pool[start][0] if pool[start][1] == "free" else 0
            void = start + (pool[start][1] == "free")
            more = min(-(-(size - have) // page) * page, pool[void][0])
            if self.capacity is not None and self.reserved + more > self.capacity:
                return None
            self.reserved += more
            pool[void : void + 1] = [[more, "free"], [pool[void][0] - more, "void"]]
            self.join(key)
            pool = self.pools[key]
        return start

    def release(self) -> None:
        for key, pool in self.pools.items():
            page, address, pieces = (2 if key[1] else 20) * MIB, 0, []
            for size, state in pool:
                low, high = -(-address // page) * page, (address + size) // page * page
                if state == "free" and low < high:
                    pieces += [[low - address, "free"], [high - low, "void"], [address + size - high, "free"]]
                    self.reserved -= high - low
                else:
                    pieces.append([size, state])
                address += size
            self.pools[key] = pieces
            self.join(key)

    def free(self, used: tuple[str, bool, int]) -> None:
        address = 0
        for piece in self.pools[used[:2]]:
            if address == used[2] and piece[0]:
                piece[1] = "free"
            address += piece[0]
        self.join(used[:2])

    def join(self, key: tuple[str, bool]) -> None:
        joined: list[list[int | str]] = []
        for size, state in self.pools[key]:
            if size and joined and state != "used" and joined[-1][1] == state:
                joined[-1][0] += size
            elif size:
                joined.append([size, state])
        self.pools[key] = joined
