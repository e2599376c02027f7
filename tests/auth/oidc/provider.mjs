// A real OpenID provider for the tests: client credentials, device login, JWT tokens.
import { Provider } from "oidc-provider";

const port = Number(process.argv[2]);
const issuer = `http://127.0.0.1:${port}`;
const resource = { scope: "api", audience: "storesvc", accessTokenFormat: "jwt", accessTokenTTL: 600 };
const provider = new Provider(issuer, {
  clients: [
    { client_id: "job", client_secret: "secret", grant_types: ["client_credentials"], redirect_uris: [], response_types: [] },
    { client_id: "storectl", token_endpoint_auth_method: "none", application_type: "native", redirect_uris: [], response_types: [],
      grant_types: ["urn:ietf:params:oauth:grant-type:device_code", "refresh_token"] },
  ],
  jwks: JSON.parse(process.argv[3]),
  features: {
    clientCredentials: { enabled: true },
    deviceFlow: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => "urn:storesvc",
      useGrantedResource: () => true,
      getResourceServerInfo: () => resource,
    },
  },
  extraTokenClaims: (_, token) => ({ groups: ["ml"], email: `${token.accountId ?? token.clientId}@corp.example` }),
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
});
provider.listen(port, "127.0.0.1", () => console.log("ready"));
