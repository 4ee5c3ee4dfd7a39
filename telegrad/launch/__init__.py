"""Workers that this program starts (`telegrad.local`), and the program of those without one. An extension."""
