"""Our training step beside the peers' own, in one process on one GPU. Nothing else imports them."""
