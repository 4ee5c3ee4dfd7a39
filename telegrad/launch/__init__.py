"""Workers started by this program (`telegrad.local`), and the program of workers without their own. An extension."""
