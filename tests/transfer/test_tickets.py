"""The ticket book refuses everything that was not granted."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.clock import ManualClock
from kvbaton.transfer.auth import Session
from kvbaton.transfer.tickets import TicketBook
from kvbaton.transfer.wire import Offer, Read

TICKET = Session(b"k", "reader", "lender").sign_ticket("r", expires_s=100.0)
OFFER = Offer(1, TICKET, (5, 6, 7), (1, 1, 1), 40, 16, 9.0)
READ = Read(1, OFFER.ticket, 0, 2, 0, 1)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def book(clock):
    book = TicketBook(num_layers=4, block_size=16, clock=clock)
    book.grant(OFFER, 9)
    return book


def test_what_is_cached_may_be_read_at_once_and_the_rest_as_it_is_computed(book):
    assert book.find(READ, 1, 9).offer is OFFER
    more = msgspec.structs.replace(READ, block_stop=3)
    assert book.find(more, 0, 9) is None
    book.advance(OFFER.ticket, 39, 2)
    assert book.find(more, 0, 9) is None
    book.advance(OFFER.ticket, 40, 1)
    assert book.find(more, 0, 9) is not None and book.find(more, 1, 9) is None
    book.advance(OFFER.ticket, 16, 4)  # late: takes nothing back
    assert book.find(more, 0, 9) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": b"u" * len(TICKET)},
        {"ticket": TICKET[:-1] + bytes((TICKET[-1] ^ 1,))},
        {"layer_stop": 5},
        {"layer_start": 1},
        {"block_start": 1},
        {"block_stop": 4},
        {"block_stop": 0},
    ],
)
def test_anything_else_is_refused(book, wrong):
    assert book.find(msgspec.structs.replace(READ, **wrong), 0, 9) is None


def test_another_connection_and_a_revoked_ticket_are_refused(book):
    assert book.find(READ, 0, 8) is None
    book.revoke(OFFER.ticket)
    book.revoke(OFFER.ticket)
    book.advance(OFFER.ticket, 40, 4)
    assert book.find(READ, 0, 9) is None and len(book) == 0


def test_a_ticket_ends_with_its_time_whatever_is_renewed(book, clock):
    clock.advance(99.9)
    assert book.find(READ, 0, 9) is not None and not book.expired(TICKET)
    clock.advance(0.2)
    assert book.find(READ, 0, 9) is None and book.take(READ, 0, 9) is None and book.expired(TICKET)


def test_each_block_of_each_layer_is_lent_once(book):
    """A replayed read is refused, also one that only overlaps."""
    book.advance(OFFER.ticket, 40, 4)
    assert book.take(READ, 0, 9) is not None and book.take(READ, 1, 9) is not None
    assert book.take(READ, 0, 9) is None and book.take(READ, 1, 9) is None
    overlapping = msgspec.structs.replace(READ, block_stop=3)
    assert book.take(overlapping, 0, 9) is None
    rest = msgspec.structs.replace(READ, block_start=1, block_stop=3)
    assert book.take(rest, 0, 9) is not None and book.take(rest, 0, 9) is None


def test_each_part_of_a_reader_has_a_block_once(book):
    """Ranks of one reader may need the same heads."""
    other = msgspec.structs.replace(READ, part=3)
    assert book.take(READ, 0, 9) is not None and book.take(other, 0, 9) is not None
    assert book.take(READ, 0, 9) is None and book.take(other, 0, 9) is None
