"""Logs that reinforcement learning frameworks already write, read as `Logged` batches.

`detect` says what it found and how, `pieces` cuts it into parts that fit memory, `read` reads one.
"""

from offdrift.records.readers.detect import detect as detect
from offdrift.records.readers.detect import pieces as pieces
from offdrift.records.readers.detect import read as read
from offdrift.records.readers.files import BadRow as BadRow
from offdrift.records.readers.files import Detected as Detected
from offdrift.records.readers.files import Piece as Piece
from offdrift.records.readers.files import Read as Read
from offdrift.records.readers.files import fingerprint as fingerprint
