"""``kvbaton drill``: rehearses failures on a running fleet."""
