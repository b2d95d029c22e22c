"""The parts of the screen. They show values, and post the user's actions."""
