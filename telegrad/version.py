"""The version of the package, read at build time too, so it imports nothing."""

VERSION = "0.1.0"
