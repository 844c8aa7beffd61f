"""One pool's TenantQuotas as they are followed: each parsed once, all looked through only after one
of them was edited. Asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.key_reading import SecretKey
from chairlift_operator.kube.watching import Edition, PoolKey, Store, edition
from chairlift_operator.parsing import SpecError
from chairlift_operator.quota_parsing import parse_quota
from chairlift_operator.quotas.roster import Claim

Json = dict[str, Any]


class QuotaClaims:
    """all: as of the last `take`. secrets: that they name, sorted."""

    def __init__(self, key: PoolKey, quotas: Store) -> None:
        self._key, self._quotas = key, quotas
        self._known: dict[str, tuple[Edition, Claim]] = {}  # by name
        self._num_edits = -1
        self.all: list[Claim] = []
        self.secrets: tuple[str, ...] = ()
        self.secret_keys: frozenset[SecretKey] = frozenset()

    @property
    def num_edits(self) -> int:
        """Another number: others may be claimed."""
        return self._num_edits

    @property
    def has_news(self) -> bool:
        """Whether they are others than at the last `take`; a status of theirs is no news."""
        return self._quotas.num_edits(self._key) != self._num_edits

    def take(self) -> frozenset[str]:
        """As they are now. Returns the Secrets that those that are new or were edited name."""
        if not self.has_news:
            return frozenset()
        self._num_edits = self._quotas.num_edits(self._key)
        before, self._known = self._known, {}
        fresh = []
        for name, item in self._quotas.of(self._key).items():
            known, current = before.get(name), edition(item)
            if known is None or known[0] != current:
                known = current, _claim(item)
                fresh.append(known[1])
            self._known[name] = known
        self.all = [claim for _, claim in self._known.values()]
        named = _secrets(self.all)
        self.secrets = tuple(sorted(named))
        self.secret_keys = frozenset((self._key[0], name) for name in named)
        return frozenset(_secrets(fresh))

    def item(self, name: str) -> Json | None:
        """The object of a quota, with its status; None where it is gone, or was edited since."""
        item, known = self._quotas.of(self._key).get(name), self._known.get(name)
        is_same = item is not None and known is not None and known[0] == edition(item)
        return item if is_same else None


def _secrets(claims: Iterable[Claim]) -> set[str]:
    specs = [claim.spec for claim in claims if claim.spec is not None]
    return {source.secret for spec in specs for source in spec.keys}


def _claim(item: Json) -> Claim:
    metadata = item["metadata"]
    document = {
        "apiVersion": names.API_VERSION,
        "kind": names.QUOTA_KIND,
        "metadata": {name: metadata[name] for name in ("name", "namespace")},
        "spec": item.get("spec"),
    }
    created = str(metadata.get("creationTimestamp", ""))
    try:
        return Claim(metadata["name"], created, parse_quota(document).spec)
    except SpecError as error:
        return Claim(metadata["name"], created, None, " ".join(error.problems))
