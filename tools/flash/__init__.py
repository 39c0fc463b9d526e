"""Put all that a board needs onto a mounted image or a running board, without a network: docs/service.md."""
