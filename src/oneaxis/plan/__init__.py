"""The arithmetic before the run: closed forms with units, and what a finished run says of each (`oneaxis plan`)."""
