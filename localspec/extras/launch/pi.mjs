// An extension that names our provider to pi, which reads none from variables.
const { LOCALSPEC_PROVIDER, LOCALSPEC_TOKEN } = process.env;
export default (pi) => pi.registerProvider("localspec", { ...JSON.parse(LOCALSPEC_PROVIDER), apiKey: LOCALSPEC_TOKEN });
