"""The parts of the screen. They show what they are given, and post what the user did."""
