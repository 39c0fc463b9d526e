"""From a bare Debian root file system, or a running board, to an enrolled, drafting one: docs/first-board.md."""
