"""The version of the package. The build reads this file, so it imports nothing."""

VERSION = "0.1.0"
