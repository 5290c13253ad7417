"""Decodes OTLP requests with the official package and checks them against the rules of the specification.

Arguments: files, gzipped, named *.metrics or *.profiles. Prints one JSON object: what is in them, and what is wrong.
"""

import collections
import gzip
import json
import sys

from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import ExportProfilesServiceRequest

errors = []


def check(good, what):
    if not good:
        errors.append(what)


def value(any_value):
    return getattr(any_value, any_value.WhichOneof("value"))


def attributes(of):
    keys = [a.key for a in of]
    check(len(keys) == len(set(keys)), f"attributes twice: {keys}")
    check(all(keys), "an attribute without a key")
    return {a.key: value(a.value) for a in of}


def unknown(message, path):
    """Fields that the package does not know: written under another definition."""
    check(len(UnknownFieldSet(message)) == 0, f"unknown fields in {path}")
    for field, content in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in [content] if hasattr(content, "ListFields") else content:
                unknown(each, f"{path}.{field.name}")


def metrics(request, result):
    for resource in request.resource_metrics:
        about = attributes(resource.resource.attributes)
        service = about.get("service.name")
        check(service, "a resource without service.name")
        result["resources"].append(about)
        for scope in resource.scope_metrics:
            check(scope.scope.name, "a scope without a name")
            names = [m.name for m in scope.metrics]
            check(len(names) == len(set(names)), f"metrics twice: {names}")
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                check(kind, f"{metric.name} has no data")
                check(metric.unit, f"{metric.name} has no unit")
                data = getattr(metric, kind)
                check(data.data_points, f"{metric.name} has no points")
                seen = set()
                if kind in ("sum", "histogram"):
                    check(data.aggregation_temporality == 2, f"{metric.name} is not cumulative")
                for point in data.data_points:
                    own = json.dumps(attributes(point.attributes), sort_keys=True)
                    check(own not in seen, f"{metric.name} has {own} twice")
                    seen.add(own)
                    check(0 < point.start_time_unix_nano <= point.time_unix_nano, f"times of {metric.name}")
                    if kind == "histogram":
                        check(len(point.bucket_counts) == len(point.explicit_bounds) + 1, f"buckets of {metric.name}")
                        check(sum(point.bucket_counts) == point.count, f"count of {metric.name}")
                        check(list(point.explicit_bounds) == sorted(set(point.explicit_bounds)), "bounds")
                        number = point.count
                    else:
                        number = value_of(point)
                    result["metrics"][service][metric.name][own] = number


def value_of(point):
    which = point.WhichOneof("value")
    check(which, "a point without a value")
    return getattr(point, which) if which else 0


def profiles(request, result):
    d = request.dictionary
    tables = {
        "mapping": d.mapping_table, "location": d.location_table, "function": d.function_table, "link": d.link_table,
        "string": d.string_table, "attribute": d.attribute_table, "stack": d.stack_table,
    }
    for name, table in tables.items():
        check(len(table) > 0, f"{name}_table has no zero entry")
        if not len(table):
            return
        zero = table[0]
        if name == "string":
            check(zero == "", "string 0 is not empty")
        else:
            check(zero.ByteSize() == 0, f"{name} 0 is not zero")
        texts = [e if name == "string" else e.SerializeToString(deterministic=True) for e in table]
        check(len(texts) == len(set(texts)), f"{name}_table has entries twice")
    used = {name: {0} for name in tables}

    def use(name, index):
        check(0 <= index < len(tables[name]), f"{name} {index} is not in its table")
        used[name].add(index)
        return tables[name][index]

    def attribute(index):
        a = use("attribute", index)
        check(index > 0, "attribute 0 is used")
        use("string", a.unit_strindex)
        return use("string", a.key_strindex), value(a.value)

    for resource in request.resource_profiles:
        about = attributes(resource.resource.attributes)
        check(about.get("service.name"), "a resource without service.name")
        result["resources"].append(about)
        kinds = []
        for scope in resource.scope_profiles:
            for profile in scope.profiles:
                kind = use("string", profile.sample_type.type_strindex)
                unit = use("string", profile.sample_type.unit_strindex)
                check(kind and unit, "a profile without a sample type")
                kinds.append(kind)
                use("string", profile.period_type.type_strindex)
                use("string", profile.period_type.unit_strindex)
                # Parca and Pyroscope refuse profiles without these, or have no name for their series.
                check(profile.HasField("period_type") and profile.period > 0, f"{kind} has no period")
                check(profile.period_type.type_strindex > 0, f"{kind} has no period type")
                check(profile.time_unix_nano > 0 and profile.duration_nano > 0, "times of a profile")
                check(len(profile.profile_id) in (0, 16), "profile_id")
                check(len(profile.samples) > 0, "a profile without samples")
                identities = set()
                shapes = set()
                for sample in profile.samples:
                    shapes.add((len(sample.values) > 0, len(sample.timestamps_unix_nano) > 0))
                    check(sample.values or sample.timestamps_unix_nano, "a sample without values and times")
                    if sample.values and sample.timestamps_unix_nano:
                        check(len(sample.values) == len(sample.timestamps_unix_nano), "values and times")
                    for ts in sample.timestamps_unix_nano:
                        inside = profile.time_unix_nano <= ts < profile.time_unix_nano + profile.duration_nano
                        check(inside, "a time outside of its profile")
                    link = use("link", sample.link_index)
                    own = [attribute(index) for index in sample.attribute_indices]
                    check(len({key for key, _ in own}) == len(own), f"attributes of a sample twice: {own}")
                    identity = (sample.stack_index, frozenset(sample.attribute_indices), sample.link_index)
                    check(identity not in identities, "two samples with one identity")
                    identities.add(identity)
                    names = []
                    for index in use("stack", sample.stack_index).location_indices:
                        location = use("location", index)
                        check(index > 0, "location 0 is in a stack")
                        use("string", use("mapping", location.mapping_index).filename_strindex)
                        check(dict(map(attribute, location.attribute_indices)).get("profile.frame.type"), "frame type")
                        for line in location.lines:
                            function = use("function", line.function_index)
                            check(line.function_index > 0, "function 0 is in a line")
                            named = [function.name_strindex, function.system_name_strindex, function.filename_strindex]
                            check(any([use("string", s) for s in named]), "a function without any name")
                            names.append(use("string", function.name_strindex))
                    total = sum(sample.values)
                    result["profiles"][about["service.name"]][kind]["total"] += total
                    endpoint = dict(own).get("cruby.request.endpoint")
                    if endpoint is not None:
                        result["endpoints"][kind][endpoint] += total
                    if sample.link_index > 0:
                        check(len(link.trace_id) == 16 and len(link.span_id) == 8, "a link without ids")
                        result["links"][kind][f"{link.trace_id.hex()}:{link.span_id.hex()}"] += total
                    for name in set(names):
                        result["profiles"][about["service.name"]][kind][name] += total
                check(len(shapes) <= 1, f"samples of a profile have different shapes: {shapes}")
        check(len(kinds) == len(set(kinds)), f"profiles of one kind twice: {kinds}")
    for name, table in tables.items():
        left = set(range(len(table))) - used[name]
        check(not left, f"{name}_table has entries that nothing uses: {sorted(left)[:5]}")


def tree():
    return collections.defaultdict(tree)


result = {
    "resources": [],
    "metrics": collections.defaultdict(lambda: collections.defaultdict(dict)),
    "endpoints": collections.defaultdict(collections.Counter),
    "links": collections.defaultdict(collections.Counter),
    "profiles": collections.defaultdict(lambda: collections.defaultdict(collections.Counter)),
}
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        data = gzip.decompress(file.read())
    kind, of = (
        (ExportMetricsServiceRequest, metrics) if path.endswith(".metrics") else (ExportProfilesServiceRequest, profiles)
    )
    request = kind()
    request.ParseFromString(data)
    unknown(request, kind.__name__)
    check(b"SECRET" not in data, f"a secret is in {path}")
    check(request.ByteSize() == len(data), f"{path} has {len(data)} bytes, what it decodes to {request.ByteSize()}")
    of(request, result)
print(json.dumps({**result, "errors": errors}))
