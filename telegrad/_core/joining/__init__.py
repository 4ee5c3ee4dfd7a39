"""How a worker comes into its group: launchers, rendezvous of fixed groups, generations of elastic ones."""
