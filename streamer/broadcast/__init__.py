"""How bytes are cut, staged and broadcast."""
