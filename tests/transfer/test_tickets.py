"""The ticket book refuses everything that was not granted."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.transfer.tickets import TicketBook
from kvbaton.transfer.wire import Offer, Read

OFFER = Offer(1, b"t" * 16, (5, 6, 7), (1, 1, 1), 40, 16, 9.0)
READ = Read(1, OFFER.ticket, 0, 2, 0, 1)


@pytest.fixture
def book():
    book = TicketBook(num_layers=4, block_size=16)
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
        {"ticket": b"u" * 16},
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
