"""Tools for testing plugins and this library itself."""
