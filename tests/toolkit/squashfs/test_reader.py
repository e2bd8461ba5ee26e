"""The reader of squash files agrees with unsquashfs, whatever made the file."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sqshforge.errors import RequestError, SqshforgeError, WorkError
from sqshforge.host.programs import Programs
from sqshforge.squashfs import content
from sqshforge.squashfs.content import Content
from sqshforge.squashfs.image import Image, open_image
from sqshforge.squashfs.superblock import LAYOUT, Superblock, read, set_duplicates
from tests.support import odd_root, squash_files
from tests.support.command_line import SCRIPT, sqshforge

BLOCK = 1 << 17  # mksquashfs's default
KINDS = {
    "folder": "d",
    "file": "f",
    "link": "l",
    "FIFO": "p",
    "socket": "s",
    "block device": "b",
    "character device": "c",
}


@pytest.fixture(scope="module")
def tree(as_root: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a squash file can hold, in each of its forms."""
    made = odd_root.make(tmp_path_factory.mktemp("squashfs") / "tree")
    chance = random.Random(1)
    for size in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        (made / f"data/random-{size}").write_bytes(chance.randbytes(size))
        (made / f"data/text-{size}").write_bytes((b"text " * size)[:size])
    with (made / "data/sparse").open("wb") as file:
        file.seek(5 * BLOCK)
        file.write(b"end")
    os.truncate(made / "data/sparse", 9 * BLOCK)
    (made / "many").mkdir()
    for number in range(2000):
        (made / f"many/{number:04d}-{'x' * (number % 100)}").symlink_to(f"{number}")
    os.mknod(made / "run/disk", stat.S_IFBLK | 0o660, os.makedev(259, 70_000))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(made / "run/socket"))
    for name in ("data/one", "data/empty", "run", "run/pipe", "run/zero", "lib/dangling"):
        os.setxattr(made / name, "trusted.name", name.encode() * 100, follow_symlinks=False)
        os.setxattr(made / name, "security.same", b"the same" * 100, follow_symlinks=False)
    os.setxattr(made / "data/one", "user.empty", b"")
    return made


def squashed(tree: Path, file: Path, *words: str) -> Path:
    Programs().capture(["mksquashfs", tree, file, "-no-progress", "-quiet", *words])
    return file


def seen(image: Image) -> dict[str, odd_root.Entry]:
    """Return what the reader finds, as entries to compare with those of the unpacked tree."""
    reading = Content(image)
    names: dict[int, set[str]] = {}
    for path, entry in image.entries.items():
        names.setdefault(entry.inode.number, set()).add(os.fsdecode(path) or ".")
    found = {}
    for path, entry in image.entries.items():
        text = ""
        if entry.kind == "file":
            text = hashlib.sha256(b"".join(reading.pieces(entry))).hexdigest()
        elif entry.kind == "link":
            text = os.fsdecode(entry.target)
        elif entry.kind.endswith("device"):
            text = str(os.makedev(*entry.device))
        found[os.fsdecode(path) or "."] = odd_root.Entry(
            kind=KINDS[entry.kind],
            mode=entry.mode,
            owner=(entry.uid, entry.gid),
            mtime=entry.mtime,
            content=text,
            names=frozenset(names[entry.inode.number] if entry.kind != "folder" else ()),
            xattrs=tuple(sorted(os.fsdecode(name) for name in image.xattrs(entry))),
        )
    return found


@pytest.fixture(scope="module")
def truth(tree: Path) -> dict[str, odd_root.Entry]:
    return odd_root.entries(tree)


@pytest.mark.processes
@pytest.mark.parametrize("compression", ["gzip", "lzma", "lzo", "lz4", "xz", "zstd"])
def test_every_compression(
    tree: Path, truth: dict[str, odd_root.Entry], tmp_path: Path, compression: str
) -> None:
    file = squashed(tree, tmp_path / "x.sqsh", "-comp", compression)
    with open_image(file) as image:
        assert image.compression == compression
        assert seen(image) == truth
        content.check(image, 2, lambda size: None)


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ("-comp", "lzo", "-noD"),  # as enroot makes them unless it is reported otherwise
        ("-noI", "-noD", "-noF", "-noX"),
        ("-no-fragments",),
        ("-always-use-fragments", "-b", "1M", "-comp", "zstd"),
        ("-b", "4K"),
        ("-no-exports", "-no-sparse", "-no-duplicates"),
    ],
    ids=" ".join,
)
def test_every_layout(
    tree: Path, truth: dict[str, odd_root.Entry], tmp_path: Path, words: tuple[str, ...]
) -> None:
    file = squashed(tree, tmp_path / "x.sqsh", *words)
    with open_image(file) as image:
        assert seen(image) == truth
        content.check(image, 2, lambda size: None)


@pytest.mark.processes
def test_extended_attributes_have_their_values(tree: Path, tmp_path: Path) -> None:
    with open_image(squashed(tree, tmp_path / "x.sqsh")) as image:
        for path, entry in image.entries.items():
            place = tree / os.fsdecode(path)
            names = os.listxattr(place, follow_symlinks=False)
            assert image.xattrs(entry) == {
                os.fsencode(name): os.getxattr(place, name, follow_symlinks=False) for name in names
            }


@pytest.mark.processes
def test_a_file_without_anything(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with open_image(squashed(tmp_path / "tree", tmp_path / "x.sqsh")) as image:
        assert list(image.entries) == [b""]
        content.check(image, 1, lambda size: None)


@pytest.mark.processes
def test_what_a_file_says_of_duplicates_can_be_set(tree: Path, tmp_path: Path) -> None:
    target = squashed(tree, tmp_path / "x.sqsh")
    before = target.read_bytes()
    said = []
    for on in (False, True):
        set_duplicates(target, on)
        shown = Programs().capture(["unsquashfs", "-s", target])
        said.append("Duplicates are removed" in shown)
    assert (said, target.read_bytes()) == ([False, True], before)


def test_what_is_no_squash_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such squash file"), open_image(tmp_path / "none"):
        pass
    with pytest.raises(RequestError, match="no such squash file"), open_image(tmp_path):
        pass
    for content_of_it in (b"", b"hsqs", b"text " * 1000):
        (tmp_path / "x").write_bytes(content_of_it)
        with pytest.raises(RequestError, match="not a squash"), open_image(tmp_path / "x"):
            pass


def look_through(path: Path) -> None:
    with open_image(path) as image:
        for entry in image.entries.values():
            image.xattrs(entry)
        content.check(image, 1, lambda size: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with something in each of its tables."""
    place = tmp_path_factory.mktemp("damage")
    tree = place / "tree"
    for name in ("a/b", "c"):
        (tree / name).mkdir(parents=True)
    chance = random.Random(2)
    for number in range(60):
        (tree / f"a/{number}").write_bytes(chance.randbytes(99) + bytes(9000) + b"end")
        (tree / f"a/b/{number}").symlink_to("x" * (number + 1))
    os.setxattr(tree / "a/1", "user.one", b"1" * 100)
    os.setxattr(tree / "a/2", "user.one", b"1" * 100)
    file = squashed(tree, place / "x.sqsh", "-b", "4K", "-noI", "-noX", "-always-use-fragments")
    return file.read_bytes()


@pytest.mark.processes
def test_damage_is_reported_in_one_error(whole: bytes, tmp_path: Path) -> None:
    path, chance, found = tmp_path / "x.sqsh", random.Random(3), 0
    start = read(written(path, whole)).tables
    for turn in range(3000):
        data = bytearray(whole)
        where = chance.randrange(LAYOUT.size) if turn % 3 == 0 else chance.randrange(len(data))
        if turn % 3 == 1:
            where = chance.randrange(start, len(data))
        data[where] = chance.choice([0, 255, data[where] ^ (1 << chance.randrange(8))])
        path.write_bytes(data)
        try:
            look_through(path)
        except SqshforgeError as error:
            found += 1
            assert str(path) in error.where or "number" in error.what
    assert found > 1000


@pytest.mark.processes
def test_a_file_cut_short_is_reported_wherever_it_ends(whole: bytes, tmp_path: Path) -> None:
    used = read(written(tmp_path / "x.sqsh", whole)).used
    for size in [*range(0, 200, 7), *range(200, used, 499), used - 1]:
        with pytest.raises(WorkError if size >= LAYOUT.size else RequestError):
            look_through(written(tmp_path / "x.sqsh", whole[:size]))


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def with_fields(data: bytes, **fields: int) -> bytes:
    """Return a file with other fields in its superblock."""
    places = {"inodes": 1, "fragments": 4, "compression": 5, "ids": 8, "root": 11, "used": 12}
    places |= {"id_table": 13, "xattr_table": 14, "inode_table": 15, "directory_table": 16}
    places |= {"fragment_table": 17}
    values = list(LAYOUT.unpack(data[: LAYOUT.size]))
    for name, value in fields.items():
        values[places[name]] = value
    return LAYOUT.pack(*values) + data[LAYOUT.size :]


Damage = Callable[[Superblock], dict[str, int]]


@pytest.mark.processes
@pytest.mark.parametrize(
    "damage",
    [
        lambda block: {"compression": 9},
        lambda block: {"fragments": 2**32 - 1},
        lambda block: {"ids": 65535},
        lambda block: {"root": 2**64 - 1},
        lambda block: {"root": block.root + 1},
        lambda block: {"inode_table": 0},
        lambda block: {"inode_table": block.directory_table},
        lambda block: {"directory_table": 2**63},
        lambda block: {"directory_table": block.inode_table},
        lambda block: {"fragment_table": block.used},
        lambda block: {"id_table": 2**64 - 1},
        lambda block: {"xattr_table": 2**64 - 1},
        lambda block: {"xattr_table": block.used - 1},
        lambda block: {"used": 2**40},
        lambda block: {"used": 0},
    ],
)
def test_a_superblock_that_lies(whole: bytes, tmp_path: Path, damage: Damage) -> None:
    path = written(tmp_path / "x.sqsh", whole)
    path.write_bytes(with_fields(whole, **damage(read(path))))
    with pytest.raises(SqshforgeError):
        look_through(path)


SECONDS = 60  # until each of these must be reported, on a slow machine
MEMORY = 1500 << 20  # bytes of address space for that, as for an archive


def few(count: int) -> list[bytes]:
    return [b"%07d" % number for number in range(count)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "depth", "names"),
    [(b"a", 3000, 0), (b"n" * 255, 3000, 0), (b"n" * 255, 8000, 0), (b"n" * 255, 15, 400_000)],
    ids=["deep", "long", "deep and long", "wide"],
)
def test_a_small_file_takes_little_memory_and_time(
    tmp_path: Path, name: bytes, depth: int, names: int
) -> None:
    path = written(tmp_path / "x.sqsh", squash_files.chain(name, depth, few(names)))
    for command in ("inspect", "verify"):
        done = Programs().attempt(
            ["prlimit", f"--as={MEMORY}", SCRIPT, command, path], timeout=SECONDS
        )
        assert "Traceback" not in done.err
        assert done.code == (0 if depth * (len(name) + 1) < 4096 and not names else 1), done.err


@pytest.mark.processes
def test_the_longest_path_that_linux_has(tmp_path: Path) -> None:
    for name, depth in ((b"a", 2048), (b"n" * 255, 16)):
        file = written(tmp_path / "x.sqsh", squash_files.chain(name, depth))
        assert sqshforge("inspect", file).code == 0
        done = sqshforge("inspect", written(file, squash_files.chain(name, depth + 1)))
        assert done.code == 1
        assert "longer than Linux can hold" in done.err and str(file) in done.err
