"""Checks ``deploy/`` with tools that operators have: kubectl, hadolint, a package
index. ``make deploy-test`` runs them; ``make test`` does not."""
