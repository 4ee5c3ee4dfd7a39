"""Named values: workers look them up wherever they are, and a lost value is made again elsewhere. An extension."""
