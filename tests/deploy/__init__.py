"""Checks of ``deploy/`` with what operators have beside storesvc: kubectl, hadolint, a
package index. ``make deploy-test`` runs them; ``make test`` does not."""
