from core.cache.kv_cache import CacheContext, CacheSettings
from core.request import Request


class OwnCache:
    """Full blocks are found again by all ids up to their end. `free` has one argument: `discard` came with API 1.1."""

    class Settings(CacheSettings):
        pass

    def __init__(self, settings: Settings, context: CacheContext):
        self.block_size = settings.block_size
        self.num_blocks = context.num_blocks
        self._num_holders = [0] * context.num_blocks
        self._blocks: dict[tuple, int] = {}  # key -> block
        self._keys: dict[int, tuple] = {}  # block -> key

    @property
    def num_free_blocks(self) -> int:
        return self._num_holders.count(0)

    def lookup(self, request: Request) -> int:
        table, size = request.block_table, self.block_size
        if request.params.prompt_logprobs is None:
            for end in range(size, request.num_tokens, size):
                block = self._blocks.get(self._key(request, end))
                if block is None:
                    break
                self._num_holders[block] += 1
                table.append(block)
        return len(table) * size

    def allocate(self, request: Request, num_tokens: int) -> bool:
        num_missing = -(-num_tokens // self.block_size) - len(request.block_table)
        if num_missing > self.num_free_blocks:
            return False
        free = [block for block in range(self.num_blocks) if not self._num_holders[block]]
        for block in sorted(free, key=self._keys.__contains__)[: max(num_missing, 0)]:
            self._blocks.pop(self._keys.pop(block, None), None)
            self._num_holders[block] = 1
            request.block_table.append(block)
        return True

    def num_freed_by(self, requests) -> int:
        held = [block for request in requests for block in request.block_table]
        return sum(self._num_holders[block] == held.count(block) for block in set(held))

    def commit(self, request: Request, num_tokens: int | None = None) -> None:
        written = request.num_computed_tokens if num_tokens is None else num_tokens
        for index in range(min(written, request.num_tokens) // self.block_size):
            block, key = request.block_table[index], self._key(request, (index + 1) * self.block_size)
            if key not in self._blocks and block not in self._keys:
                self._blocks[key], self._keys[block] = block, key

    def free(self, request: Request) -> None:
        for block in request.block_table:
            self._num_holders[block] -= 1
        request.block_table.clear()

    def reset(self) -> bool:
        if self.num_free_blocks < self.num_blocks:
            return False
        self._blocks.clear()
        self._keys.clear()
        return True

    def check(self) -> None:
        assert min(self._num_holders) >= 0
        assert all(self._keys[block] == key for key, block in self._blocks.items())

    def _key(self, request: Request, end: int) -> tuple:
        return (request.tenant, request.cache_salt, *request.token_ids(0, end))
