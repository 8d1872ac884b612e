"""What tests of hyper_mpmd need, and tests of a user's own ops."""
