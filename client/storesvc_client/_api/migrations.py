"""The migrations of a run: ``run.migrations``.

They are kept in the record of the run, so that all processes and later jobs have them.
A change is conditional on the etag of the run: two at a time do not lose one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

from storesvc.format.names import Which
from storesvc_client._api.groups import Group, get_run, update_run
from storesvc_client._api.opening import Opening
from storesvc_client._rpc.connection import RunStub
from storesvc_client._session import Session
from storesvc_client._values.arguments import checked_text
from storesvc_client._values.options import MappingRules
from storesvc_client.errors import InvalidRequestError, LimitError, NotFoundError
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from storesvc_client._restore.migrations import Migration


MAX_MIGRATIONS: Final = 64
"""Maximum migrations of a run, by the contract."""

Listed: TypeAlias = "list[Migration]"
"""Within the class, ``list`` is a function."""


class Migrations(Group):
    """The migrations of a run; ``run.migrations``.

    Rules by which older checkpoints are restored into today's code: ``Run.restore``,
    ``Loop.restore_or`` and the restores of models apply those that were made for the
    tree of the checkpoint. All else, such as ``Run.open``, shows it as it is stored.

    >>> run.migrations.add({"version": 1, "otherwise": "keep", "rules": [
    ...     {"default": {"shape": [8], "dtype": "float32", "value": 0}, "to": "bias"}
    ... ]})
    """

    def __init__(self, session: Session, stub: RunStub) -> None:
        super().__init__(stub)
        self._session = session

    def list(self) -> "Listed":
        """Returns the migrations, in the order in which they are applied.

        Raises:
            NotFoundError: There is no such run.
            PreconditionError: They are of a later release.
        """
        return self._unpack(get_run(self._stub))

    def add(self, rules: MappingRules, *, which: Which = "latest") -> "Migration":
        """Adds a migration for checkpoints whose tree is that of one checkpoint, as the
        migrations before it make it. Nothing stored changes.

        Args:
            rules: A TOML or JSON file, or a parsed document; see ``Run.restore``.
            which: The checkpoint: a step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            MismatchError: The rules do not fit the checkpoint.
            InvalidRequestError: They make the same keys, shapes and dtypes, or a tree
                that another migration takes.
            LimitError: The run has 64 migrations, or they would exceed 256 KiB.
            ConflictError: The run changed in the meantime.
        """
        from storesvc_client._restore.mapped import load_rules
        from storesvc_client._restore.migrations import Migration

        run = get_run(self._stub)
        timeout = self._stub.connection.timeout
        opening = Opening(self._session, self._stub, which, deadline=timeout)
        reader = opening.read(migrates=True).map_or_migrate(None)
        found = Migration.make(reader, load_rules(rules))
        for other in self._unpack(run):
            if found.target == other.source:
                raise InvalidRequestError(
                    f"{found.name}: expected rules that make another tree than the one "
                    f"that the migration {other.name} takes, as checkpoints saved with "
                    "it would be migrated, too; keep the rules of that one, "
                    f"run.migrations.remove('{other.digest[:12]}'), add these, and "
                    "then, with the same which=, those that are to follow them"
                )
        migrations = [*run.migrations, found.pack()]
        place = f"{self._stub.name}: migration {found.name}"
        if len(migrations) > MAX_MIGRATIONS:
            raise LimitError(
                f"{place}: expected at most {MAX_MIGRATIONS} migrations of a run, got "
                "one more; remove one whose checkpoints are no longer needed"
            )
        try:
            self._set(run, migrations)
        except LimitError as e:
            raise LimitError(
                f"{place}, {len(migrations[-1])} bytes of {sum(map(len, migrations))}: "
                f"{e}; write fewer rules with placeholders, or remove a migration",
                reason=e.reason,
                metadata=e.metadata,
            ) from e
        return found

    def remove(self, digest: str) -> None:
        """Removes a migration.

        Args:
            digest: ``Migration.digest``, or its first characters.

        Raises:
            NotFoundError: The run has no such migration, or several; or there is no
                such run.
            InvalidRequestError: The digest is no text, or empty.
            ConflictError: The run changed in the meantime.
        """
        if not checked_text(f"migrations of {self._stub.name}: digest", digest):
            raise InvalidRequestError(
                f"migrations of {self._stub.name}: expected the digest of one, such as "
                f"run.migrations.list()[0].digest, got {digest!r}"
            )
        run = get_run(self._stub)
        digests = [each.digest for each in self._unpack(run)]
        found = [n for n, each in enumerate(digests) if each.startswith(digest)]
        if len(found) != 1:
            names = ", ".join(each[:12] for each in digests) or "none"
            raise NotFoundError(
                f"{self._stub.name}: expected one migration {digest!r}, got "
                f"{len(found)}; the run has {names}"
            )
        self._set(run, [x for n, x in enumerate(run.migrations) if n not in found])

    def _set(self, run: api.Run, migrations: Iterable[bytes]) -> None:
        message = api.Run(migrations=migrations)
        update_run(self._stub, message, ["migrations"], run.etag)

    def _unpack(self, run: api.Run) -> "Listed":
        from storesvc_client._restore.migrations import Migration

        place = str(self._stub.name)
        return [Migration.unpack(each, place=place) for each in run.migrations]
