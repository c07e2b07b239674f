"""What the API server stores, under one counter of versions. Sans-IO.

In: objects and requests about them; the time of day for timestamps. Out: objects, lists, the history that watches are
served from, and `Refused` with what a `Status` says. The rules are those of Kubernetes' API conventions: optimistic
concurrency by `resourceVersion`, lists as snapshots with tokens that expire, a window of history beyond which a version
is gone (410), deletion that waits for finalizers and, for pods, for the kubelet.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.kube import patches, schema
from tests.kube.resources import BUILT_IN, Resource, crds, of_crd

Json = dict[str, Any]
Predicate = Callable[[Json], bool]
Key = tuple[str, str]
"""Namespace and name."""
SNAPSHOTS = 16
"""Paged lists that can be continued at a time."""


class Refused(Exception):
    """A request the server does not grant: HTTP status, reason and words of the Status it answers."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details

    def status(self) -> Json:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def expired(message: str = "The resourceVersion for the provided watch is too old.") -> Refused:
    return Refused(410, "Expired", message)


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the history: an object before and after, either None."""

    version: int
    collection: tuple[str, str]
    before: Json | None
    after: Json | None

    def seen_by(self, takes: Predicate) -> tuple[str, Json] | None:
        """The event that a watch with this selector gets of it."""
        was = self.before is not None and takes(self.before)
        if self.after is not None and takes(self.after):
            return ("MODIFIED" if was else "ADDED"), self.after
        if was and self.before is not None:
            gone = {**self.before, "metadata": {**self.before["metadata"], "resourceVersion": str(self.version)}}
            return "DELETED", gone
        return None


class Store:
    """All objects of a cluster. `changed` is called after each change."""

    def __init__(self, wall: Callable[[], float], *, window: int = 1000, with_crds: bool = True) -> None:
        self.version = 1000
        self.window = window
        self.changed: Callable[[], None] = lambda: None
        self.terminating: Callable[[Resource, Json], None] = lambda resource, obj: None
        """Told of a pod that is to end; whoever takes it calls `finish`."""
        self.resources: list[Resource] = list(BUILT_IN)
        self.history: deque[Change] = deque()
        self.compacted = self.version
        """Versions before this one are gone."""
        self._wall = wall
        self._objects: dict[tuple[str, str], dict[Key, Json]] = {}
        self._snapshots: OrderedDict[str, list[Json]] = OrderedDict()
        for name in ("default", "kube-system"):
            self.create(self.resource("", "v1", "namespaces"), "", {"metadata": {"name": name}})
        if with_crds:
            for crd in crds():
                self.add_crd(crd)

    # Resources

    def add_crd(self, crd: Json) -> None:
        self.resources += of_crd(crd)

    def remove_crd(self, group: str, plural: str) -> None:
        """The CRD is deleted, and every object of it."""
        self.resources = [r for r in self.resources if (r.group, r.plural) != (group, plural)]
        self._objects.pop((group, plural), None)
        self.changed()

    def resource(self, group: str, version: str, plural: str) -> Resource:
        """Raises Refused where the server does not have it."""
        wanted = (group, version, plural)
        for resource in self.resources:
            if (resource.group, resource.version, resource.plural) == wanted:
                return resource
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def kind(self, kind: str, group: str = "") -> Resource:
        return next(r for r in self.resources if r.kind == kind and r.group == group)

    # Reading

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        obj = self._of(resource).get((namespace, name))
        if obj is None:
            raise self._not_found(resource, name)
        return obj

    def all(self, resource: Resource, namespace: str = "") -> list[Json]:
        """Objects in the order of their keys; `namespace` "" is all of them."""
        of = self._of(resource)
        return [of[key] for key in sorted(of) if namespace in ("", key[0])]

    def page(
        self, resource: Resource, namespace: str, takes: Predicate, *, limit: int = 0, token: str = ""
    ) -> tuple[list[Json], str, str]:
        """Objects of one page, the version they are of, and the token of the next page."""
        if token:
            try:
                snapshot, start = json.loads(base64.urlsafe_b64decode(token))
                rest, version = self._snapshots[snapshot][start:], snapshot.partition("-")[0]
            except (ValueError, KeyError, TypeError):
                message = "The provided continue parameter is too old to display a consistent list result."
                raise expired(message) from None
        else:
            rest, version = [obj for obj in self.all(resource, namespace) if takes(obj)], str(self.version)
            snapshot, start = f"{version}-{uuid.uuid4()}", 0
        if not limit or len(rest) <= limit:
            return rest, version, ""
        if not token:
            self._snapshots[snapshot] = rest
            while len(self._snapshots) > SNAPSHOTS:
                self._snapshots.popitem(last=False)
        after = base64.urlsafe_b64encode(json.dumps([snapshot, start + limit]).encode()).decode()
        return rest[:limit], version, after

    def since(self, resource: Resource, version: int) -> list[Change]:
        """What changed in a collection after a version. Raises Refused (410) where the history does not reach back."""
        if version < self.compacted:
            raise expired()
        collection = (resource.group, resource.plural)
        return [change for change in self.history if change.version > version and change.collection == collection]

    # Writing

    def create(self, resource: Resource, namespace: str, obj: Json) -> Json:
        metadata = obj.setdefault("metadata", {})
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise Refused(422, "Invalid", "name or generateName is required")
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if metadata.get("namespace") not in (None, "", namespace):
            raise Refused(400, "BadRequest", "the namespace of the object does not match the namespace on the request")
        if metadata.get("resourceVersion"):
            raise Refused(422, "Invalid", "resourceVersion should not be set on objects to be created")
        name = metadata["name"]
        if resource.namespaced:
            self.get(self.resource("", "v1", "namespaces"), "", namespace)
        if (namespace, name) in self._of(resource):
            raise Refused(409, "AlreadyExists", f'{resource.title} "{name}" already exists', name=name)
        stored = self._admitted(resource, obj)
        stored["metadata"] = {
            **metadata,
            **({"namespace": namespace} if resource.namespaced else {}),
            "uid": str(uuid.uuid4()),
            "creationTimestamp": self._time(),
            **({"generation": 1} if resource.schema is not None else {}),
        }
        if resource.has_status and resource.schema is not None:
            stored.pop("status", None)
        return self._put(resource, (namespace, name), stored)

    def update(self, resource: Resource, namespace: str, obj: Json, *, status: bool = False) -> Json:
        """Replace an object, or its `status` alone. Where it names a version that is not the stored one: 409."""
        metadata = obj.get("metadata") or {}
        name = str(metadata.get("name"))
        before = self.get(resource, namespace, name)
        version = metadata.get("resourceVersion")
        if version not in (None, "", before["metadata"]["resourceVersion"]):
            raise Refused(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {resource.title} "{name}": the object has been modified; '
                "please apply your changes to the latest version and try again",
                name=name,
            )
        if metadata.get("uid") not in (None, "", before["metadata"]["uid"]):
            raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {metadata.get('uid')}")
        if status:
            after = {**deepcopy(before), "status": obj.get("status", {})}
            after = self._admitted(resource, after)
        else:
            after = self._admitted(resource, obj)
            kept = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
            after["metadata"] = {
                **{k: v for k, v in metadata.items() if k not in (*kept, "resourceVersion")},
                **{k: before["metadata"][k] for k in kept if k in before["metadata"]},
                **({"namespace": namespace} if resource.namespaced else {}),
            }
            # Of built-in kinds, tests write the status with the rest.
            if resource.has_status and resource.schema is not None:
                after.pop("status", None)
                if "status" in before:
                    after["status"] = before["status"]
                if after.get("spec") != before.get("spec"):
                    after["metadata"]["generation"] += 1
        if {**after, "metadata": {**after["metadata"], "resourceVersion": ""}} == {
            **before,
            "metadata": {**before["metadata"], "resourceVersion": ""},
        }:
            return before  # nothing changed: no new version
        ending = after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers")
        if ending and resource.plural != "pods":
            return self._drop(resource, (namespace, name))
        return self._put(resource, (namespace, name), after)

    def patch(
        self, resource: Resource, namespace: str, name: str, kind: str, patch: Any, *, status: bool = False
    ) -> Json:
        """`kind`: the media type of the patch."""
        before = self.get(resource, namespace, name)
        try:
            if kind == "application/merge-patch+json":
                after = patches.merge(before, patch)
            elif kind == "application/strategic-merge-patch+json" and resource.schema is None:
                after = patches.strategic(before, patch)
            elif kind == "application/json-patch+json":
                after = patches.json_patch(before, patch)
            else:
                raise Refused(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {kind}")
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(422, "Invalid", f"the patch does not fit: {error}") from None
        if not (isinstance(patch, dict) and (patch.get("metadata") or {}).get("resourceVersion")):
            after["metadata"] = {**after["metadata"], "resourceVersion": ""}
        return self.update(resource, namespace, after, status=status)

    def delete(
        self, resource: Resource, namespace: str, name: str, *, grace_s: int | None = None, uid: str = ""
    ) -> Json:
        before = self.get(resource, namespace, name)
        if uid and uid != before["metadata"]["uid"]:
            raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {uid}")
        grace = 30 if grace_s is None and resource.plural == "pods" else (grace_s or 0)
        if not grace and not before["metadata"].get("finalizers"):
            return self._drop(resource, (namespace, name))
        if before["metadata"].get("deletionTimestamp"):
            return before
        after = deepcopy(before)
        after["metadata"] |= {"deletionTimestamp": self._time(), "deletionGracePeriodSeconds": grace}
        stored = self._put(resource, (namespace, name), after)
        if resource.plural == "pods":
            self.terminating(resource, stored)
        return stored

    def finish(self, resource: Resource, namespace: str, name: str) -> None:
        """The kubelet says that a pod has ended. One that is gone already is none of its business."""
        if (namespace, name) in self._of(resource):
            self._drop(resource, (namespace, name))

    def put(self, kind: str, obj: Json, group: str = "", namespace: str = "default") -> Json:
        """For tests: create an object, or replace the one of its name, status included."""
        resource = self.kind(kind, group)
        namespace = namespace if resource.namespaced else ""
        if (namespace, obj["metadata"]["name"]) not in self._of(resource):
            made = self.create(resource, namespace, deepcopy(obj))
            if resource.schema is None or "status" not in obj:
                return made
        stored = self.update(resource, namespace, deepcopy(obj))
        if resource.schema is not None and "status" in obj:
            stored = self.update(resource, namespace, deepcopy(obj), status=True)
        return stored

    # The past

    def compact(self) -> None:
        """Forget the history, as etcd does every few minutes: older versions are gone, tokens too."""
        self.history.clear()
        self._snapshots.clear()
        self.compacted = self.version

    def snapshot(self) -> Any:
        """What a backup holds."""
        return self.version, {c: dict(of) for c, of in self._objects.items()}

    def restore(self, snapshot: Any) -> None:
        """Start again from a backup: older versions, objects that were deleted since, and no history."""
        self.version, objects = snapshot
        self._objects = {c: dict(of) for c, of in objects.items()}
        self.compact()
        self.changed()

    # Inside

    def _of(self, resource: Resource) -> dict[Key, Json]:
        return self._objects.setdefault((resource.group, resource.plural), {})

    def _not_found(self, resource: Resource, name: str) -> Refused:
        return Refused(404, "NotFound", f'{resource.title} "{name}" not found', name=name, kind=resource.plural)

    def _admitted(self, resource: Resource, obj: Json) -> Json:
        if resource.schema is None:
            stored = deepcopy(obj)
        else:
            try:
                stored, _ = schema.admit(obj, dict(resource.schema))
            except schema.Invalid as invalid:
                name = obj.get("metadata", {}).get("name")
                message = f'{resource.kind}.{resource.group} "{name}" is invalid: {invalid}'
                causes = [{"reason": "FieldValueInvalid", "message": m, "field": f} for f, m in invalid.faults]
                details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": causes}
                raise Refused(422, "Invalid", message, **details) from None
        stored["apiVersion"], stored["kind"] = resource.group_version, resource.kind
        return stored

    def _put(self, resource: Resource, key: Key, obj: Json) -> Json:
        before = self._of(resource).get(key)
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._of(resource)[key] = obj
        self._log(resource, before, obj)
        return obj

    def _drop(self, resource: Resource, key: Key) -> Json:
        before = self._of(resource).pop(key)
        self.version += 1
        self._log(resource, before, None)
        return before

    def _log(self, resource: Resource, before: Json | None, after: Json | None) -> None:
        self.history.append(Change(self.version, (resource.group, resource.plural), before, after))
        while len(self.history) > self.window:
            self.compacted = self.history.popleft().version
        self.changed()

    def _time(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def both(*predicates: Predicate) -> Predicate:
    """All of them."""

    def takes(obj: Json) -> bool:
        return all(predicate(obj) for predicate in predicates)

    return takes


def in_namespace(namespace: str) -> Predicate:
    return lambda obj: namespace in ("", obj["metadata"].get("namespace", ""))


def events(changes: Iterable[Change], takes: Predicate) -> list[tuple[int, str, Json]]:
    """Version, type and object of each event that a watch with this selector gets."""
    seen = ((change.version, change.seen_by(takes)) for change in changes)
    return [(version, *event) for version, event in seen if event is not None]
