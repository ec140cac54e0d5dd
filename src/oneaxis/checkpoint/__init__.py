"""Model folders: fetched, read and written."""
