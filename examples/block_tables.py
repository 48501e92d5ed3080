"""Ten blocks of four tokens, and requests A to E that arrive, grow, share and leave: block tables as text, no model.

    python examples/block_tables.py

A token is a letter here. The bookkeeping is the engine's own (`hf_paged.core`, which needs no torch). No application
needs it: `model.paged.snapshot()` shows the tables of a model that runs.
"""

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.errors import OutOfBlocksError

NUM_BLOCKS, BLOCK_SIZE = 10, 4
FREE, KEPT = "-", "kept"  # a free block that is kept can be found by its content, until another request takes it


class Simulation:
    """The bookkeeping of a pool, and beside it a picture of what its blocks hold."""

    def __init__(self) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.texts: dict[str, str] = {}
        self.contents = [""] * NUM_BLOCKS

    def arrive(self, name: str, text: str) -> None:
        """A request with a prompt: the blocks that hold its beginning already are found, and the others are taken."""
        seq_id = ord(name)
        self.manager.add(seq_id)
        found = self.manager.prefix.match(seq_id, [ord(letter) for letter in text])
        self.texts[name] = text[:found]
        try:
            self.grow(name, text[found:])
        except OutOfBlocksError as error:
            self.leave(name)
            self.show(f"{name} has to wait: {error}")
        else:
            self.show(f"{name} arrives with {len(text)} tokens, {found} of them found")

    def grow(self, name: str, text: str) -> None:
        seq_id, start = ord(name), len(self.texts[name])
        for source, destination in self.manager.append([(seq_id, len(text))]):
            self.contents[destination] = self.contents[source]
        self.texts[name] += text
        for position, letter in enumerate(text, start=start):
            block = self.manager.block_table(seq_id)[position // BLOCK_SIZE]
            self.contents[block] = self.contents[block][: position % BLOCK_SIZE] + letter
        self.manager.prefix.commit(seq_id, [ord(letter) for letter in self.texts[name]])  # full blocks can be found

    def write(self, name: str, letter: str) -> None:
        copies, in_use = self.manager.num_cow_copies, self.manager.pool.num_in_use
        self.grow(name, letter)
        taken = self.manager.pool.num_in_use > in_use
        how = "into a copy" if self.manager.num_cow_copies > copies else "to a new block" if taken else "in place"
        self.show(f"{name} writes token {len(self.texts[name])} {how}")

    def fork(self, parent: str, child: str) -> None:
        self.manager.fork(ord(parent), ord(child))
        self.texts[child] = self.texts[parent]
        self.show(f"{child} is another sample of {parent}'s prompt: it begins with the same blocks")

    def leave(self, name: str) -> None:
        self.manager.free(ord(name))
        del self.texts[name]

    def end(self, *names: str) -> None:
        for name in names:
            self.leave(name)
        self.show(f"{' and '.join(names)} end{'s' * (len(names) == 1)}")

    def show(self, headline: str) -> None:
        """Prints who holds which block, and all block tables."""
        self.manager.check_invariants()
        tables = {name: self.manager.block_table(ord(name)) for name in self.texts}
        cells = []
        for block, text in enumerate(self.contents):
            holders = "".join(name for name, table in tables.items() if block in table)
            is_kept = self.manager.pool.block_hash(block) is not None
            state = holders or (KEPT if is_kept else FREE)
            shown = "" if state == FREE else text.replace(" ", "_")
            cells.append((str(block), shown.ljust(BLOCK_SIZE, "."), state))
        print(f"\n{headline}")
        for label, row in zip(("block", "tokens", "held by"), zip(*cells)):
            print(f"  {label:8}", *(f"{cell:6}" for cell in row))
        for name, table in tables.items():
            print(f"  table of {name}: {table}")


def main() -> None:
    pool = Simulation()
    pool.arrive("A", "the cat sat on a mat")  # 20 tokens: five blocks, all of them full
    pool.arrive("B", "the dog")  # 7 tokens: two blocks, the first of which is A's
    pool.write("B", " ")  # the 8th token fills the second block
    pool.write("B", "r")  # the 9th takes a third one
    pool.fork("B", "C")
    pool.write("C", "a")  # the last block is shared: the first to write copies it,
    pool.write("B", "u")  # and the other one has it alone
    pool.end("A")  # its full blocks are free, and can still be found
    pool.arrive("D", "the cat sat by me")  # "the cat sat " is found
    pool.arrive("E", "a horse came back")  # 17 tokens: five blocks, and two are free
    pool.end("B", "C")
    pool.arrive("E", "a horse came back")  # free blocks that are kept are taken last, ends of sequences first
    pool.end("D", "E")


if __name__ == "__main__":
    main()
