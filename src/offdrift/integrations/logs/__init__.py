"""Logs that reinforcement learning frameworks already write, read as `Logged` batches.

`detect` says what it found and how, `pieces` cuts it into parts that fit memory, `read` reads one.
"""

from offdrift.integrations.logs.detect import detect as detect
from offdrift.integrations.logs.files import fingerprint as fingerprint
from offdrift.integrations.logs.pieces import pieces as pieces
from offdrift.integrations.logs.reader import read as read
from offdrift.integrations.logs.types import BadRow as BadRow
from offdrift.integrations.logs.types import Detected as Detected
from offdrift.integrations.logs.types import Piece as Piece
from offdrift.integrations.logs.types import Read as Read
