from mla_plugin.conformance.suite import BackendConformance

class TestSdpa(BackendConformance):
    backend = "sdpa"
